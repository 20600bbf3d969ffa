-- A repeated command id gets its first answer again; if its body differs, it gets a conflict.
-- Needs KEYS[3] (refusals).
--- @include "cost"
--- @include "packed_values"
--- @include "decide"

-- Refusals are stored for the whole shard, so their field names the campaign too; no id contains '/'.
local function refusal_field(campaign, id)
  return campaign .. '/' .. id
end

-- The same of a grab: its id belongs to its offer and its user, so no other user can use it up.
local function refusal_field_of_grab(offer, user, id)
  return offer .. '/' .. user .. '/' .. id
end

-- The refusals that are stored for grabs of an offer: a list with false where there is none, or an empty one.
local function stored_refusals(offer, ids, users)
  if redis.call('EXISTS', KEYS[3]) == 0 then return {} end
  local fields = {}
  for i = 1, #ids do fields[i] = refusal_field_of_grab(offer.name, users[i], ids[i]) end
  return redis.call('HMGET', KEYS[3], unpack(fields))
end

-- The answer that is stored under an id, unless the offer it names has retired; then nil.
local function answer_that_counts(call, campaign, record)
  if record then spend(COST.answer_byte * #record) end
  return record and not has_retired(call, offer_of_answer(record, campaign.name)) and record or nil
end

-- Whether an answer is stored under each of these fields of a campaign, as a list. Answers may have a hundred
-- codes; so where a campaign has large answers, none is read.
local function are_answered(campaign, fields)
  if campaign.is_large == nil then campaign.is_large = redis.call('HGET', campaign.state_key, 'large') end
  if not campaign.is_large then return redis.call('HMGET', campaign.answers_key, unpack(fields)) end
  spend(COST.read_ahead * #fields)
  local answered = {}
  for i = 1, #fields do answered[i] = redis.call('HSTRLEN', campaign.answers_key, fields[i]) > 0 end
  return answered
end

-- The answer that is stored under the id of a grab, or false. `part` is its user's part of an envelope, which
-- is the answer, if the id is that of the grab.
local function answer_to_grab(call, campaign, offer, name, part, id)
  if not (offer and offer.pieces) then
    return part and answer_of_part(part, id, offer.tail) or false
  end
  local field = answer_field_of_grab(name, id)
  if campaign.answers[field] == nil then
    campaign.answers[field] = answer_that_counts(call, campaign,
      redis.call('HGET', campaign.answers_key, field)) or false
  end
  return campaign.answers[field]
end

-- A refusal that is stored, unless its offer has retired; then nil. `call.in_order` has the fields of records
-- that stay in the order of refusals.
local function refusal_that_counts(call, campaign, field, record)
  if not record then return nil end
  if not has_retired(call, offer_of_refusal(record, campaign.name)) then return record end
  call.in_order[field] = true
end

-- The row for a command whose effect already holds; seq and time are those of the event that had the effect.
local function again_row(code, seq, at, quantity)
  return {code = code, seq = seq, at = at, quantity = quantity or 0, repeated = true,
    details = {again = true}}
end

-- The row of an earlier answer; nil when there is none. `otherwise` is the row for another body under the
-- same id; if it is absent, a conflict. If only the gate can compare the bodies, the result is
-- `otherwise` with details.kept, the stored digest, and details.first, the row for an equal body.
local repeated_row
do
  -- Returns the first answer under an id as a row, and the stored parts of its body: the digest and, from an
  -- answer, the offer's name and the whole body if it is stored. `record` and `refusal` are what is stored,
  -- or false; `parts` is the number of parts of the offer.
  local function first_row(record, refusal, campaign, parts)
    if not record then
      local code, at, digest, seq, quantity = unpack_refusal(refusal)
      return seq and again_row(code, seq, at, quantity) or {code = code, at = at, repeated = true}, digest
    end
    local code, seq, at, place, amount, digest, tail = unpack_answer(record)
    local name, row, full = unpack_row(tail)
    if row then
      row.repeated = true
      return row, digest, name, full
    end
    name = tail ~= '' and tail or campaign
    if code ~= CODE.granted then
      return {code = code, seq = seq, at = at, amount = amount, left = place, repeated = true}, digest, name
    end
    return {code = code, seq = seq, at = at, amount = amount, quantity = 1, place = place,
      left = (parts or 0) - place, repeated = true}, digest, name
  end

  local function form_of(digest)
    return string.match(digest, '^[^$]*%$') or ''
  end

  -- Whether the stored body equals the sent one; nil when only the gate can decide it, because the stored
  -- digest has another form or another key. `sent` has digest (in full, also of a plain grab), offer, whole
  -- or nil, and, for a plain grab, has(): whether its user has this grab.
  local function is_same(digest, name, full, sent)
    if name and (full or sent.whole) then return full == sent.whole and name == sent.offer end
    if digest == PLAIN then return sent.has ~= nil and name == sent.offer and sent.has() end
    if digest == sent.digest then return true end
    if form_of(digest) == form_of(sent.digest) then return false end
    return nil
  end

  function repeated_row(record, refusal, sent, now, campaign, parts, otherwise)
    if not record and not refusal then return nil end
    local row, digest, name, full = first_row(record, refusal, campaign, parts)
    local same = is_same(digest, name, full, sent)
    if same then return row end
    otherwise = otherwise or {code = CODE.conflict, at = now, details = {}}
    if same == nil then otherwise.details.kept, otherwise.details.first = digest, row end
    return otherwise
  end
end
