std = "lua51"
globals = {"redis", "KEYS", "ARGV", "cjson", "cmsgpack", "struct", "bit"}
max_line_length = 110
