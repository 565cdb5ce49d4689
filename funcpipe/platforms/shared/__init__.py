"""The common parts of several clouds: packages and images of funcpipe, polling, bodies over HTTP."""
