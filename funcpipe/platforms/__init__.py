"""Where functions run and objects live."""
