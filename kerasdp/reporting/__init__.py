"""Prints the messages of a run, and writes its files and charts."""
