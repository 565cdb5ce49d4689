"""What follows from plans and traces: predictions, better plans, the use of time, predicted beside observed."""
