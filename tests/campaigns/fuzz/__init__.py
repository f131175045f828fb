"""Mutated checkpoints, signals and full disks, and what commands promise all the same.

Its processes are forked, so each runs one thread, and they need no network.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what a driver holds does not survive a fork
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
