-- Reads the outbox, for the scripts of the shard's owner.
-- Needs KEYS[2], the outbox stream, and the include shard.

-- Lua hashes every line that it reads. An entry that begins below a bound is read whole.
local LINES_MAX = 1000
local BYTES_MAX = 131072

-- Reads entries; none where the key has another type. A takeover then finds a hole (sweeping/due.lua).
local function read_entries(...)
  local entries = redis.pcall(...)
  if not entries.err then return entries end
  if not string.find(entries.err, 'WRONGTYPE', 1, true) then error(entries) end
  return {}
end

-- The entry that holds a seq, if there is one; else the last one before it, or nil.
local function entry_at(seq)
  return read_entries('XREVRANGE', KEYS[2], string.format('%d-0', seq), '-', 'COUNT', 1)[1]
end

-- The first entry after an entry; without one, the first of all. Or nil.
local function entry_after(entry)
  return read_entries('XRANGE', KEYS[2], entry and '(' .. entry[1] or '-', '+', 'COUNT', 1)[1]
end

-- The entries from one on, in order: {id, {'e', line, 'e', line, …}}, with the number of its grabs in place
-- of 'e' where a line is a run. They end when a bound is reached.
local function entries_from(entry, entries_max)
  local entries, lines, bytes = {}, 0, 0
  while entry do
    entries[#entries + 1] = entry
    lines = lines + #entry[2] / 2
    for i = 2, #entry[2], 2 do bytes = bytes + #entry[2][i] end
    if #entries >= entries_max or lines >= LINES_MAX or bytes >= BYTES_MAX then break end
    entry = entry_after(entry)
  end
  return entries
end
