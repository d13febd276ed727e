"""These tests need a GPU; elsewhere they are not collected (the same behaviour is tested on the CPU in the other folders)."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
