"""What several clouds need: packages and images of funcpipe, polling, bodies over HTTP."""
