"""Where an engine and its workers write their stacks, for the server."""

STACKS_FOLDER = "QUIRE_STACKS_FOLDER"  # variable with the folder
STACKS_SUFFIX = ".stacks"
