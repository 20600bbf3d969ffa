-- Undoes what a script has decided but not written: the grabs of a basket are all granted or all refused.

--- @each_call
local undo_log

-- Sets a field of a table. While a basket is decided, the old value is logged, so that `undo` can restore it.
local function put(table, key, value)
  if undo_log then undo_log[#undo_log + 1] = {table, key, table[key]} end
  table[key] = value
end

local function append(list, value)
  put(list, #list + 1, value)
end

local function undo()
  for i = #undo_log, 1, -1 do
    local entry = undo_log[i]
    entry[1][entry[2]] = entry[3]
  end
  undo_log = nil
end
