"""The language that methods are written in. Imports torch and nothing else of this project."""
