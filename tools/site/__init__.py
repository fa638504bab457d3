"""Makes pages of the documentation at build time: answers of a running server, messages of the code."""
