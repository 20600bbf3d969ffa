-- The same command id gets its first answer again; another body under it is a conflict.
-- Needs KEYS[3] (refusals).
--- @include "cost"
--- @include "records"
--- @include "decide"

-- Refusals are kept for the whole shard, so their field names the campaign too; '/' cannot stand in an id.
local function refusal_field(campaign, id)
  return campaign .. '/' .. id
end

-- What is kept under an id, as long as the offer it names has not retired; else nil.
local function answer_that_counts(call, campaign, record)
  if record then spend(COST.answer_byte * #record) end
  return record and not has_retired(call, offer_of_answer(record, campaign.name)) and record or nil
end

local function refusal_that_counts(call, campaign, field, record)
  if not record then return nil end
  if not has_retired(call, offer_of_refusal(record, campaign.name)) then return record end
  call.outlived[field] = true
end

-- The row of what is so already: it names the event that made it so.
local function again_row(code, seq, at, quantity)
  return {code, seq, at, 0, quantity or 0, 0, 0, 1, 0, {again = true}}
end

-- The row of an earlier answer, or nil when there is none; `otherwise` is the row for another body under the
-- id, a conflict if absent. A row is {code, seq, at, amount, quantity, place, left, repeated, retry_at,
-- more}. Where the gate has to compare, it is `otherwise` with more.kept, the digest to compare with, and
-- more.first, the row if it is the same.
local repeated_row
do
  -- The first answer kept under an id as a row; and its body: the digest, the offer's name (of a record), the
  -- whole of it where it is kept. `record` and `refusal` are what is kept, or false; `parts` those of the
  -- offer.
  local function first_row(record, refusal, campaign, parts)
    if not record then
      local code, at, digest, seq, quantity = unpack_refusal(refusal)
      return seq and again_row(code, seq, at, quantity) or {code, 0, at, 0, 0, 0, 0, 1}, digest
    end
    local code, seq, at, place, amount, digest, tail = unpack_answer(record)
    local name, row, full = unpack_row(tail)
    if row then
      row[8] = 1
      return row, digest, name, full
    end
    name = tail ~= '' and tail or campaign
    if code == 0 then return {code, seq, at, amount, 1, place, (parts or 0) - place, 1}, digest, name end
    return {code, seq, at, amount, 0, 0, place, 1}, digest, name
  end

  local function form_of(digest)
    return string.match(digest, '^[^$]*%$') or ''
  end

  -- Whether the body that is kept is the one that was sent; nil when only the gate can tell, because the kept
  -- digest has another form or another key. `sent`: digest (in full, also of a plain grab), offer, whole or
  -- nil, has (for a plain grab: whether its user has it).
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
    otherwise = otherwise or {CODE.conflict, 0, now, 0, 0, 0, 0, 0, 0, {}}
    if same == nil then otherwise[10].kept, otherwise[10].first = digest, row end
    return otherwise
  end
end
