"""Training examples: run as scripts from the repository root, never shipped in the wheel."""
