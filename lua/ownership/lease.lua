#!lua flags=allow-oom
-- Takes the lease of a shard for a time, so that one relay copies its outbox. A worker gets the lease if it
-- is free or already its own; time 0 gives it back. A command of an operator seizes the lease from any
-- holder; the former holder releases the shard at its next renewal.
--
-- KEYS[1] lease string · KEYS[2] shard hash
-- ARGV[1] worker · ARGV[2] milliseconds · ARGV[3] '1' to seize it
-- Returns the holder: the worker itself when it has the lease, '' when it gave the lease back; or 'a newer
--         program' when a newer program writes the shard, and this one cannot relay it.
--- @include "shard"

local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] and ARGV[3] ~= '1' then return holder end
local held = redis.call('HMGET', KEYS[2], 'layout', 'seq')
local layout = layout_of(held[1], held[2])
if ARGV[2] == '0' or layout > LAYOUT then
  redis.call('DEL', KEYS[1])
  return layout > LAYOUT and 'a newer program' or ''
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ARGV[1]
