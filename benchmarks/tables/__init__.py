"""The tables and sentences of the documents, of the result files alone; docs/generate.py puts them there."""
