"""The web UI, `tfactory ui`, over the files on disk. Its process does not import torch; see docs/UI.md."""
