#!lua
-- Loads a chunk of a list that an offer needs: coupon codes (sealed), or the ids of the users who may grab.
--
-- Command: load
-- KEYS[1] shard hash · KEYS[2] outbox stream · KEYS[3] refusals hash · KEYS[4] refusal_order list ·
--   KEYS[5] demand hash
-- KEYS[6] due zset · KEYS[7] offers set · KEYS[8] holds zset · KEYS[9] campaigns hash · KEYS[10] retired set
-- KEYS[11] past zset · KEYS[12] cleaning hash
-- KEYS[13 …] ten keys for each offer, then five for each campaign, see includes/offers.lua
-- ARGV[1] shard/shards · ARGV[2] caller time ms · ARGV[3] time to use ms or '' · ARGV[4] clock skew ms ·
--   ARGV[5] outbox events max
-- ARGV[6] msgpack, see includes/command.lua; a body: {what, chunk, chunks, items,
--         other_names: names of codes under other seal keys, see includes/codes.lua, operator, signers}
-- Outcomes: 21 fenced · 22 busy (whole call) · 23 conflict · 24 no_such_offer · 20 invalid · 29 over ·
--   13 loaded
-- Events: offer.loaded
-- Returns msgpack: {0, history, rows} as grab does, or {code, retry_at, message}.
--- @include "cost"
--- @include "decide"
--- @include "offers"
--- @include "codes"
--- @include "command"

-- The index in a chunk of a code that is already in the list, or nil. `names` are the names of the chunk's
-- codes under one key.
local function index_of_known(offer, names)
  local is_known = redis.call('SMISMEMBER', KEYS[offer.base + KEY.names], unpack(names))
  for index, name in ipairs(names) do
    if is_known[index] == 1 or offer.names_seen and offer.names_seen[name] then return index end
  end
end

-- The reason why a chunk of sealed codes cannot be added to a list, or nil. `other_names` has the names of
-- the codes under the other keys, by key.
local function unfit_codes(offer, list, items, other_names)
  if not list then return nil end
  local sealed_names, key = {}, nil
  for i, code in ipairs(items) do key, sealed_names[i] = string.match(code, KEY_AND_NAME) end
  for _, list_key in ipairs(list.keys or {}) do
    local names = list_key == key and sealed_names or other_names and other_names[list_key]
    if not names then
      return 'items: codes of this list were sealed with key ' .. list_key
        .. ', which is not in GRAB_SEAL_KEYS: add it again after the new key'
    end
    local index = index_of_known(offer, names)
    if index then
      return 'items: code ' .. index .. ' of this chunk is in the list already; each is given once'
    end
  end
end

-- The reason why a chunk is invalid for this offer, or nil.
local function unfit(offer, body, list)
  if body.what == 'codes' and offer.kind ~= 'coupon' then return 'what: only coupons have codes' end
  if body.what == 'codes' and offer.rules.max_per_grab > BOUNDS.codes_per_grab then
    return 'what: max_per_grab must be ' .. BOUNDS.with_codes
  end
  if body.what == 'audience' and offer.rules.audience ~= 'list' then
    return 'what: the audience of this offer is not a list'
  end
  if list and list.chunks ~= body.chunks then return 'chunks: differs from the chunks loaded before' end
end

local function is_seen(offer, member)
  return offer.seen_new[member] or redis.call('SISMEMBER', KEYS[offer.base + KEY.seen], member) == 1
end

local function load(call, offer, id, digest, body)
  spend((body.what == 'codes' and 3 or 1) * COST.item * #body.items)
  local list, member = offer.loads[body.what], body.what .. '/' .. body.chunk
  local message, is_loaded = unfit(offer, body, list), is_seen(offer, member)
  local loaded, listed = list and list.loaded or 0, list and list.count or 0
  if not message and not is_loaded and body.what == 'codes' then
    local codes = listed + #body.items
    if codes > offer.total or (loaded + 1 == body.chunks and codes ~= offer.total) then
      message = 'items: there must be as many codes as units'
    end
    message = message or unfit_codes(offer, list, body.items, body.other_names)
  end
  if message then return refused_row(call, CODE.invalid, {message = message}) end
  if is_loaded then return {code = CODE.conflict, at = call.now} end
  local awaited = not list and body.what == 'codes' and offer.rules.codes
  local complete = loaded == (list and list.chunks or 0)
  if offer.closed or (call.now >= offer.opens_at and complete and not awaited) then
    return refused_row(call, CODE.over)
  end
  offer.seen_new[member] = true
  local loading = {chunks = body.chunks, loaded = loaded + 1}
  if body.what == 'codes' then
    add_codes(offer, list, loading, body.items)
    listed = listed + #body.items
  else
    -- A user who is in the list twice counts once.
    offer.audience_new = offer.audience_new or {}
    local is_member = redis.call('SMISMEMBER', KEYS[offer.base + KEY.audience], unpack(body.items))
    for n, user in ipairs(body.items) do
      if is_member[n] == 0 and not offer.audience_new[user] then
        offer.audience_new[user] = true
        listed = listed + 1
      end
    end
  end
  loading.count = listed
  offer.loads[body.what] = loading
  offer.loads_changed = true
  add_line(call, event_head(call, offer, 'offer.loaded', id) .. ',"what":"' .. body.what .. '","chunk":'
    .. body.chunk
    .. ',"chunks":' .. body.chunks .. ',"count":' .. listed .. ',"items":["'
    .. table.concat(body.items, '","') .. '"]'
    .. senders_text(body) .. ',"digest":"' .. digest .. '"}')
  return {code = CODE.loaded, seq = call.seq, at = call.now, quantity = listed, left = offer.units_left}, true
end

return carry_out(load)
