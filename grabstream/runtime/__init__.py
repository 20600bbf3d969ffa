"""What every process needs: which errors are the loss of a server, how tasks end and pause, counters and
traces, and how to query a foreign server over HTTP.
"""
