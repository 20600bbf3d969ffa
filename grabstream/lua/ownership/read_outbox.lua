#!lua flags=no-writes
-- Reads the outbox from a given event on, for the shard's owner only.
--
-- KEYS[1] shard hash · KEYS[2] outbox stream
-- ARGV[1] term · ARGV[2] owner · ARGV[3] server epoch · ARGV[4] first seq wanted · ARGV[5] entries at most
-- Returns {seq of the shard, entries, why the shard needs a takeover or ''}: the entries of
--         includes/outbox.lua, from the entry that holds the first seq wanted, and fault_for_owner of
--         includes/shard.lua; or the error LOST when the shard has another owner.
--- @include "shard"
--- @include "outbox"

local lost = lost_ownership()
if lost then return lost end
local entries = entries_from(entry_at(tonumber(ARGV[4])) or entry_after(), tonumber(ARGV[5]))
return {redis.call('HGET', KEYS[1], 'seq') or '0', entries, fault_for_owner(KEYS[1], ARGV[3])}
