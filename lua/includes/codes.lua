-- Coupon codes that are loaded in chunks: each code once in an offer, although nobody here can read them. A
-- sealed code is `<key id>:<base64>` and begins, behind the key's id, with its name: the same code of an
-- offer, sealed with the same key, has the same one (lua/gate/sealing.py). Names are kept until the list is
-- complete or the offer closes; nothing can be loaded afterwards.

-- As many characters as NAME_LENGTH of lua/gate/sealing.py.
local KEY_AND_NAME = '^([^:]+):(' .. string.rep('[%w+/]', 12) .. ')'

-- Adds a chunk of sealed codes to a list; `list` is how far it was loaded before (or nil), `loaded` how far
-- it is with this chunk. Releases before 0.2 sealed codes with fresh nonces: theirs have names, too, which
-- tell nothing.
local function add_codes(offer, list, loaded, items)
  for _, code in ipairs(items) do offer.codes_back[#offer.codes_back + 1] = code end
  if loaded.loaded == loaded.chunks then
    offer.names_new, offer.names_seen, offer.names_gone = nil, nil, true
    return
  end
  loaded.keys = list and list.keys or {}
  offer.names_new, offer.names_seen = offer.names_new or {}, offer.names_seen or {}
  for _, code in ipairs(items) do
    local key, name = string.match(code, KEY_AND_NAME)
    if key then
      offer.names_new[#offer.names_new + 1] = name
      offer.names_seen[name] = true
      local keys = loaded.keys
      local is_known = false
      for _, one in ipairs(keys) do is_known = is_known or one == key end
      if not is_known then keys[#keys + 1] = key end
    end
  end
end
