"""From an ordinary nn.Module to layers, and from layers to the module of one stage."""
