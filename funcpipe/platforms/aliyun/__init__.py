"""Alibaba Cloud: functions on Function Compute 3.0, what they need, and how it is set up and taken away."""
