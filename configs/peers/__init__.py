"""Translates flags and variables of other servers."""
