import torch
from hypothesis import settings

settings.register_profile("funcpipe", deadline=None)  # no test is about time
settings.load_profile("funcpipe")
torch.set_num_threads(1)  # as in functions: more threads than free processors make torch many times slower
