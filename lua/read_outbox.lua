#!lua flags=no-writes
-- The outbox from an event on, for the shard's owner only.
--
-- KEYS[1] shard hash · KEYS[2] outbox stream
-- ARGV[1] term · ARGV[2] owner · ARGV[3] life · ARGV[4] first seq wanted · ARGV[5] entries at most
-- Returns {seq of the shard, entries, '1' when the shard is incomplete, else ''}: stream entries {id, {'e', line, 'e', line, …}} in order,
--         from the one that holds the first seq wanted; or the error LOST when another took the shard over.
--- @include "shard"

if not is_owner(KEYS[1], ARGV[1], ARGV[2], ARGV[3]) then return redis.error_reply('LOST the shard has another owner, term or life') end
local from = redis.call('XREVRANGE', KEYS[2], ARGV[4] .. '-0', '-', 'COUNT', 1)
local start = from[1] and from[1][1] or '-'
local shard = redis.call('HMGET', KEYS[1], 'seq', 'partial')
return {shard[1] or '0', redis.call('XRANGE', KEYS[2], start, '+', 'COUNT', ARGV[5]), shard[2] or ''}
