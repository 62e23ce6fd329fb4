"""Define the commands, one module each."""
