from hypothesis import settings

settings.register_profile("funcpipe", deadline=None)  # no test is about time
settings.load_profile("funcpipe")
