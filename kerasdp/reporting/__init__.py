"""Prints what people see of a run, and writes its files and charts."""
