"""An ordinary nn.Module as layers, and one stage of them as a module of its own."""
