#!lua flags=allow-oom
-- The first step of taking a shard over: a higher term, and the attempt's own random owner id (DESIGN 4.6, step 1).
--
-- KEYS[1] shard hash
-- ARGV[1] term that must be exceeded · ARGV[2] owner id
-- Returns {term, life of the server, life and history under which the shard was last reconciled, seq}; '' for what is absent.
--- @include "shard"

local held = redis.call('HMGET', KEYS[1], 'term', 'life', 'history', 'seq')
local term = math.max(tonumber(held[1] or 0), tonumber(ARGV[1])) + 1
redis.call('HSET', KEYS[1], 'term', string.format('%.0f', term), 'owner', ARGV[2])
return {string.format('%.0f', term), life_of_server(), held[2] or '', held[3] or '', held[4] or '0'}
