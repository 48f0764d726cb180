"""The tables and sentences of the documents, from the result files only; docs/generate.py puts them there."""
