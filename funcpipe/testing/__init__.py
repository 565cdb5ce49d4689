"""For authors of platforms: storage in memory."""
