"""Implements the command line."""
