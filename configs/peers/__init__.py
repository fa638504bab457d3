"""Flags and variables of other servers, and their meanings here."""
