"""Alibaba Cloud: functions on Function Compute 3.0, their resources, and setting these up and removing them."""
