"""Reading a family from the source of the installed Transformers. Files are parsed; nothing of them runs."""
