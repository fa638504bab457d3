"""Where an engine's processes write their stacks, one file each, for the server."""

STACKS_FOLDER = "QUIRE_STACKS_FOLDER"  # variable with the folder
STACKS_SUFFIX = ".stacks"
