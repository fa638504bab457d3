"""Pages of the documentation that are made when it is built: answers of a running server, messages of the code."""
