"""The two files of a family, written by a rule from Transformers' own source, which is read and not run."""
