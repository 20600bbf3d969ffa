std = "lua51"
globals = {"redis", "KEYS", "ARGV", "cjson", "cmsgpack", "struct", "bit"}
max_line_length = 140
-- A script is assembled from includes, and uses some of their helpers.
unused = true
ignore = {"211", "212"}
