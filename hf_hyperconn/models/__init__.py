"""Hyper-connection models.

Every file beside this one may be shipped to a Hub repo, where files are flat. They import torch, transformers and
each other (`from .name import ...`), nothing else of this package.
"""
