"""Where functions begin: one module for each runtime, and what all of them do."""
