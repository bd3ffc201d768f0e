"""The only code that knows processes, threads and streams."""
