"""Functions that are processes of this machine, with the limits of a cloud if wanted, and storage in a folder."""
