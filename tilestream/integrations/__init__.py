"""Adapters for libraries that bring their own attention interface; nothing here is imported by `tilestream` itself."""
