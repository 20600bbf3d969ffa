"""What every process needs, whatever it does: which errors are the loss of a server, how tasks end and pause,
and how a foreign server is asked over HTTP.
"""
