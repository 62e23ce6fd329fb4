"""Break the library in one place at a time, and see whether its tests notice."""
