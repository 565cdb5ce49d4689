"""AWS: functions on Lambda, their resources, and setting these up and removing them."""
