"""For authors of platforms: suites that every back-end must pass, storage in memory, storage that fails on purpose.

The suites are classes for pytest to collect; nothing here needs pytest to be installed.
"""
