"""Objects in a Valkey or Redis server; the only folder that imports its client library."""
