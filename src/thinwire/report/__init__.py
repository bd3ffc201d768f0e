"""What a comparison shows: sentences, and a page that needs nothing but a browser."""
