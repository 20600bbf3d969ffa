#!lua flags=allow-oom
-- One relay a shard: takes the lease when it is free or already this worker's, for a time; with time 0 gives
-- it back. An operator's command seizes it, whoever holds it; the worker that held it lets the shard go at
-- its next renewal.
--
-- KEYS[1] lease string · KEYS[2] shard hash
-- ARGV[1] worker · ARGV[2] milliseconds · ARGV[3] '1' to seize it
-- Returns the holder: the worker itself when it has the lease now, '' when it gave it back, 'a newer program'
--         when the shard is written by one, and this one cannot relay it.
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
