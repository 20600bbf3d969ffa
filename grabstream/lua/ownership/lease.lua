#!lua flags=allow-oom
-- Takes the lease of a shard for a time, so that one relay copies its outbox. A worker gets the lease if it
-- is free or already its own; time 0 returns it. A command of an operator seizes the lease from any holder;
-- the former holder releases the shard at its next renewal.
--
-- The same call keeps the list of the workers that may be given shards: each stays in it for the time of a
-- lease after its last call.
--
-- KEYS[1] lease string · KEYS[2] shard hash · KEYS[3] present hash
-- ARGV[1] worker · ARGV[2] milliseconds · ARGV[3] '1' to seize it · ARGV[4] what others read about this
--         worker (streams/relaying/shares.py); '' if it may not be given shards
-- Returns a list. First the holder: the worker itself when it has the lease, '' when it gave the lease back;
--         or 'a newer program' when a newer program writes the shard, and this one cannot relay it. Then, of
--         each other worker in the list, its name and its report.
--- @include "shard"

local worker, lease_ms, may_be_given = ARGV[1], tonumber(ARGV[2]), ARGV[4] ~= ''
-- The lease of no program lacks an end. Keys of another type, which no program makes, are deleted.
for i, kind in pairs({[1] = 'string', [3] = 'hash'}) do
  local actual = redis.call('TYPE', KEYS[i]).ok
  if actual ~= kind and actual ~= 'none' then redis.call('DEL', KEYS[i]) end
end
local holder = redis.call('PTTL', KEYS[1]) ~= -1 and redis.call('GET', KEYS[1])
local held = redis.call('HMGET', KEYS[2], 'layout', 'seq')
-- With a damaged layout, a relay is needed: its takeover names the fault.
local is_newer = (layout_of(held[1], held[2]) or 0) > LAYOUT
local now = time_of_server()
local entries = redis.call('HGETALL', KEYS[3])
local reply, ended = {''}, {}
may_be_given = may_be_given and lease_ms > 0 and not is_newer
for at = 1, #entries, 2 do
  local until_ms, about = string.match(entries[at + 1], '^(%d+) (.*)$')
  if entries[at] == worker then
    if not may_be_given then table.insert(ended, worker) end
  elseif until_ms and #until_ms < 15 and tonumber(until_ms) > now then
    table.insert(reply, entries[at])
    table.insert(reply, about)
  else
    table.insert(ended, entries[at])
  end
end

if #ended > 0 then redis.call('HDEL', KEYS[3], unpack(ended)) end
if may_be_given then
  redis.call('HSET', KEYS[3], worker, string.format('%d %s', now + lease_ms, ARGV[4]))
end
if holder and holder ~= worker and ARGV[3] ~= '1' then
  reply[1] = holder
elseif lease_ms == 0 or is_newer then
  redis.call('DEL', KEYS[1])
  reply[1] = is_newer and 'a newer program' or ''
else
  redis.call('SET', KEYS[1], worker, 'PX', lease_ms)
  reply[1] = worker
end
return reply
