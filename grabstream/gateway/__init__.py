"""The gateway: commands and questions over HTTP.

It decides nothing. A request becomes a command for the gate of this process, or a question to the views in
PostgreSQL; the answer becomes a status and a JSON document.

`app.py` puts the parts together. `operations.py` lists the routes; `openapi.py` describes them. `problems.py`
has the table of refusals. `protocol.py` and `serving.py` run the server.
"""
